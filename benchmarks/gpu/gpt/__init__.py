"""Training step of a compiled GPT over documents, with new ones every step: anyattn against torch's flex attention."""
