"""Document masks run as varlen batches: each document of a dense call becomes a sequence of its own."""
