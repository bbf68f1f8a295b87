"""Where a request goes: the prefix index, cost, choice, ledger and admission."""
