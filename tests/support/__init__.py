"""What tests share: inputs, references, judges, pretended machines, child processes."""
