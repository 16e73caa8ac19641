"""Does sharing pay? Arms of a study, what they are measured by, and what is written of them."""
