"""Analyses of expressions: row ranges, tile classes, load bounds, evaluation."""
