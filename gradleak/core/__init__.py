"""What all rooms stand on: trees, errors, methods, settings, files, statistics. It knows no attack and no defense."""
