"""Integrations: replacements of other libraries' attention functions by anyattn."""
