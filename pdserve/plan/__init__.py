"""Plans a cluster before it is built: `pdserve profile` measures one engine, and `pdserve plan`
predicts the load that layouts of many engines can serve.

It runs the real router, worker loops and engines in virtual time. Only the executors and transfers
are simulated ("on paper"). Their steps take the time that a profile says (docs/design/planner.md).
This room knows no Ray and no HTTP. It loads weights only to measure a profile. The command line
calls it.
"""
