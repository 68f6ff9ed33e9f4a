"""OpenAI's Responses API: input items become a `Call`, its chunks a response or the events of one; what is kept of it.

Pure functions of their arguments, on plain dicts, as `openai/` is. Knows no HTTP and no engine.
"""
