"""The queue of a router: fair shares of tenants, priorities that age, and dispatch by room."""
