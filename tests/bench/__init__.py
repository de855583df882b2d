"""Benchmarks: what a boundary, a turn and a reload cost, beside the bare drivers.

``nox -s bench`` runs them all; ``nox -s bench -- --help`` says what can be chosen. Nothing in
here is asserted: times belong to a machine and a moment. What must hold on every machine
(round trips, growth of bytes) is asserted in the test suites.
"""
