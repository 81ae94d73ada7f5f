"""The model: which op reads which weight, record and slot."""
