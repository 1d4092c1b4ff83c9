"""Integrations: attention of other libraries' functions, computed by anyattn."""
