"""One chart a file, each a function from the loaded report to a `Chart`."""
