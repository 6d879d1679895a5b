{leased_rows}
{take}
