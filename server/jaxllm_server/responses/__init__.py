"""OpenAI's Responses API. Pure."""
