"""The pages: their code runs, the menu has them all, and their tables name every option."""
