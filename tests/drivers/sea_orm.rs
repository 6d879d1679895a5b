use sea_orm::{ConnectionTrait, DatabaseConnection, DbErr, Statement, TransactionTrait};

pub(crate) async fn pay(db: &DatabaseConnection, id: &str) -> Result<String, DbErr> {
    let with = |sql, values| Statement::from_sql_and_values(db.get_database_backend(), sql, values);
    let tx = db.begin().await?;
    let record = "SELECT webhook_deliveries_record('shop', $1, $2)";
    let record = with(record, vec![id.into(), 2_592_000.0.into()]);
    let row = tx.query_one_raw(record).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound("no reply".to_owned()))?;
    let outcome: String = row.try_get_by_index(0)?;
    if outcome == "first" {
        tx.execute_raw(with("INSERT INTO payments VALUES ($1)", vec![id.into()])).await?;
        tx.commit().await?; // the key and the payment, or neither
    }
    Ok(outcome)
}
