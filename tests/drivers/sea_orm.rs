use sea_orm::{ConnectionTrait, DatabaseConnection, Statement, TransactionTrait};
use tower_dedup::{BoxError, Delivery};

pub(crate) async fn pay(db: &DatabaseConnection, event: &Delivery) -> Result<(), BoxError> {
    let with = |sql: &str, value: &str| {
        Statement::from_sql_and_values(db.get_database_backend(), sql, vec![value.into()])
    };
    let tx = db.begin().await?;
    tx.execute_raw(with("INSERT INTO payments VALUES ($1)", event.id())).await?;
    let completion = event.completion()?;
    tx.execute_raw(with(completion.sql(), completion.parameter())).await?;
    tx.commit().await?; // the key and the payment, or neither
    Ok(())
}
