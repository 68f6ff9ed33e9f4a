"""OpenAI's Responses API: converts items to a `Call`, chunks to responses or events, and stores responses. Pure."""
