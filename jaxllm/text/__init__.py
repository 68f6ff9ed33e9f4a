"""Between text and token ids: tokenizers, chat templates, incremental detokenization, stop strings.

Knows strings and token ids. Knows no model, no device and no scheduler.
"""
