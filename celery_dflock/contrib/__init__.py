"""For what some projects have and others have not: nothing here is imported by the rest."""
