"""The expression IR: typed operations, their text form, dependence and derivatives."""
