"""Other programs' attention computed by anyattn."""
