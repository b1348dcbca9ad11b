"""Times what a model costs on the machine at hand."""
