"""For tests: the conformance suite, the state machine, faults on demand, a scripted model."""
