"""OpenAI's Responses API: requests to calls, chunks to responses and events, and their store. Pure."""
