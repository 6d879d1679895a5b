use diesel::sql_types::Text;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use tower_dedup::{BoxError, Delivery};

pub(crate) async fn pay(
    connection: &mut AsyncPgConnection,
    event: &Delivery,
) -> Result<(), BoxError> {
    let completion = event.completion()?;
    connection
        .transaction(async |tx| {
            let pay = diesel::sql_query("INSERT INTO payments VALUES ($1)");
            pay.bind::<Text, _>(event.id()).execute(tx).await?;
            let complete = diesel::sql_query(completion.sql());
            complete.bind::<Text, _>(completion.parameter()).execute(tx).await?;
            Ok::<_, diesel::result::Error>(()) // the key and the payment, or neither
        })
        .await?;
    Ok(())
}
