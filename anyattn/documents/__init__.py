"""Documents as sequences: a call whose mask separates documents runs each document as a sequence of its own."""
