"""Plans a cluster before it is built: `pdserve profile` measures one engine, and `pdserve plan`
predicts what layouts of many would serve.

Runs the real router, worker loops and engines in virtual time over engines on paper, whose steps
take what a profile says (docs/design/planner.md). Knows no Ray and no HTTP; loads no weights but
for a profile. Called by the command line.
"""
