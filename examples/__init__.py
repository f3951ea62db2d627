"""Examples: one idea a file, and the demo. Each is run by the tests."""
