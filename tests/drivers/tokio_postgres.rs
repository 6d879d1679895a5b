use tokio_postgres::Client;
use tower_dedup::{BoxError, Delivery};

pub(crate) async fn pay(client: &mut Client, event: &Delivery) -> Result<(), BoxError> {
    let tx = client.transaction().await?;
    tx.execute("INSERT INTO payments VALUES ($1)", &[&event.id()]).await?;
    let completion = event.completion()?;
    tx.execute(completion.sql(), &[&completion.parameter()]).await?;
    tx.commit().await?; // the key and the payment, or neither
    Ok(())
}
