"""Others who answer: an agent as it is, a chat endpoint, a person."""
