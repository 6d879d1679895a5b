use rusqlite::{Connection, TransactionBehavior};
use tower_dedup::{BoxError, Delivery};

pub(crate) fn pay(connection: &mut Connection, event: &Delivery) -> Result<(), BoxError> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("INSERT INTO payments VALUES (?1)", [event.id()])?;
    let completion = event.completion()?;
    tx.execute(completion.sql(), [completion.parameter()])?;
    tx.commit()?; // the key and the payment, or neither
    Ok(())
}
