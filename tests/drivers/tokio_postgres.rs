use tokio_postgres::{Client, Error};

pub(crate) async fn pay(client: &mut Client, id: &str) -> Result<String, Error> {
    let tx = client.transaction().await?;
    let record = "SELECT webhook_deliveries_record('shop', $1, $2)";
    let outcome: String = tx.query_one(record, &[&id, &2_592_000_f64]).await?.get(0);
    if outcome == "first" {
        tx.execute("INSERT INTO payments VALUES ($1)", &[&id]).await?;
        tx.commit().await?; // the key and the payment, or neither
    }
    Ok(outcome)
}
