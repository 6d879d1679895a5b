use sqlx8::{self as sqlx, PgPool};
use tower_dedup::{BoxError, Delivery};

pub(crate) async fn pay(pool: &PgPool, event: &Delivery) -> Result<(), BoxError> {
    let mut tx = pool.begin().await?;
    let payment = sqlx::query("INSERT INTO payments VALUES ($1)").bind(event.id());
    payment.execute(&mut *tx).await?;
    let completion = event.completion()?;
    sqlx::query(completion.sql()).bind(completion.parameter()).execute(&mut *tx).await?;
    tx.commit().await?; // the key and the payment, or neither
    Ok(())
}
