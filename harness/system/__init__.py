"""The system under test, one file a kind: an engine in this process, worker processes, something that is not ours."""
