"""The HTTP server: bodies become requests of the engine, and its tokens become answers for OpenAI's clients."""
