"""The cost model: seconds of one step on each stage of a group of ranks, from shapes, degrees and
an H200's rates.

It knows no schedule and no cluster. `profile.scaled` uses it for points that a profile has not
measured. benchmarks/costs uses it for whole runs, and compares them with all measurements.
"""
