"""What both protocols share: calls, the serving of them, options, keys, quotas, the table of errors.

Knows `AsyncLLM`. Knows neither HTTP nor gRPC.
"""
