use serde_json::json;
use tokio::time::sleep;

use super::*;
use crate::webhook::fake::Fake;

const CLASS: &str = "gpu.affinode.io";

fn template() -> ClaimName {
    ClaimName::Template("gpu".into())
}

/// Stores the template after this time, and returns the device classes that the webhook reads
/// meanwhile.
async fn classes_of_late_template(after: Duration) -> Option<Vec<String>> {
    let fake = Fake::default();
    let cluster = ClusterState::watch(fake.client(), "affinode");
    let appear = async {
        sleep(after).await;
        let request = json!({ "name": "gpu", "exactly": { "deviceClassName": CLASS } });
        let template = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": { "name": "gpu", "namespace": "ml" },
            "spec": { "spec": { "devices": { "requests": [request] } } },
        });
        fake.put("/apis/resource.k8s.io/v1/namespaces/ml/resourceclaimtemplates/gpu", template);
    };
    let (claims, ()) = tokio::join!(cluster.claims("ml", vec![template()]), appear);
    claims[&template()].clone()
}

/// A manifest can have the pod before its ResourceClaimTemplate.
#[tokio::test(start_paused = true)]
async fn template_that_follows_its_pod_is_read() {
    let found = classes_of_late_template(Duration::from_secs(1)).await;
    assert_eq!(found, Some(vec![CLASS.to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn missing_template_is_given_up_in_time() {
    assert_eq!(classes_of_late_template(TIME).await, None);
}
