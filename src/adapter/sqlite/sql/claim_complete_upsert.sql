{claimed_rows}
{take}
