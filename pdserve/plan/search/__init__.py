"""Finds each layout's goodput by simulations in processes of their own.

This package knows layouts and jobs. `pdserve.plan.simulation` is the simulation itself.
"""
