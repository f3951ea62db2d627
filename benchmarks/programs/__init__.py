"""Programs that the loads run as processes of their own."""
