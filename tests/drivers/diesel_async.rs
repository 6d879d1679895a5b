use diesel::QueryResult;
use diesel::dsl::sql;
use diesel::sql_types::{Double, Text};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

pub(crate) async fn pay(connection: &mut AsyncPgConnection, id: &str) -> QueryResult<String> {
    connection
        .transaction(async |tx| {
            let record = sql::<Text>("SELECT webhook_deliveries_record('shop', ")
                .bind::<Text, _>(id)
                .sql(", ")
                .bind::<Double, _>(2_592_000.0)
                .sql(")");
            let outcome: String = record.get_result(tx).await?;
            if outcome == "first" {
                let pay = diesel::sql_query("INSERT INTO payments VALUES ($1)").bind::<Text, _>(id);
                pay.execute(tx).await?;
            }
            Ok(outcome) // the key and the payment, or neither
        })
        .await
}
