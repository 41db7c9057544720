"""A cluster on paper, in virtual time: real routers, worker loops and engines, but executors and
transfers that only take time.

A process that simulates has other clocks (`virtual_time`), so it does nothing else. `child` is its
main module. This package knows no layouts and no searches.
"""
