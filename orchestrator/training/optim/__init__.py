"""AdamW and Muon, and which parameter goes to which of their groups."""
