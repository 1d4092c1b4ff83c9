"""What ``torch.compile`` and ``torch.export`` see of a call with mods."""
