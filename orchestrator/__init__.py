"""From a grid in YAML to a ledger of seeded trials: compose, plan, run on Ray, record, report."""
