"""OpenAI's API: converts requests to calls, results to responses. Pure."""
