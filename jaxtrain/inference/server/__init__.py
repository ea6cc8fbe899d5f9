"""The HTTP server: bodies become requests of the engine, and its tokens become answers as OpenAI's clients read them."""
