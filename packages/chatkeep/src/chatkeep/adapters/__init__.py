"""Where adapters of model providers and agents live; each imports its provider by itself.

A model of your own needs none of them: see :class:`chatkeep.engine.ModelAdapter`.
"""
