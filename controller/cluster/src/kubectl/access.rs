//! The user's access to the cluster: kubeconfig, namespace, and the token that is sent to node
//! agents.

use std::path::PathBuf;

use clap::Args;
use http_body_util::Empty;
use hyper::{
    Request, Response,
    body::Bytes,
    header::{AUTHORIZATION, HeaderValue},
};
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
};
use kube::{
    Api, Client, Config,
    api::PostParams,
    client::ConfigExt,
    config::{KubeConfigOptions, Kubeconfig},
};
use tower::{BoxError, Layer, ServiceExt, service_fn};

use super::error::PluginError;
use crate::error_chain::ApiError;

/// Requested validity of a service account's token, in seconds. The API server accepts no shorter
/// validity.
const TOKEN_SECONDS: i64 = 600;

/// Options that select the cluster and its user. kubectl does not pass its own options to a plugin,
/// so the user gives these options after `kubectl affinode`.
#[derive(Args, Clone, Debug)]
pub struct ConnectionArgs {
    /// Path of the kubeconfig. Default: the variable KUBECONFIG, otherwise ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig. Default: its current context.
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// Namespace of the pods. Default: the namespace of the context.
    #[arg(short, long, global = true, value_name = "NAME")]
    namespace: Option<String>,
    /// Service account for requests to the node agents. The command requests a token of this
    /// account, which is valid for 10 min. Use this option if the kubeconfig's user has a client
    /// certificate, because the agents accept only tokens.
    #[arg(long, global = true, value_name = "NAMESPACE/NAME", value_parser = account)]
    service_account: Option<AccountName>,
}

/// Name of a service account.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AccountName {
    namespace: String,
    name: String,
}

fn account(text: &str) -> Result<AccountName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
            Ok(AccountName { namespace: namespace.to_owned(), name: name.to_owned() })
        }
        _ => Err("expected NAMESPACE/NAME".to_owned()),
    }
}

/// A client of the API server that has the user's rights, and the token that is sent to node
/// agents.
pub struct ClusterAccess {
    /// Client of the API server.
    pub client: Client,
    /// Namespace that the user selected for pods.
    pub namespace: String,
    token: Option<HeaderValue>,
}

impl ClusterAccess {
    /// Reads the kubeconfig, and creates the client and the token from it.
    ///
    /// # Errors
    /// [`PluginError`]: the kubeconfig is invalid, or the credentials of its user cannot be used.
    pub async fn open(asked: ConnectionArgs) -> Result<ClusterAccess, PluginError> {
        let mut config = config(&asked).await?;
        let auth = &config.auth_info;
        if auth.impersonate.is_some() || auth.impersonate_groups.is_some() {
            return Err(PluginError::Impersonates);
        }
        let mut token = token_of(&config).await?;
        if let Some(token) = &token
            && let Some(bearer) = token.to_str().ok().and_then(|text| text.strip_prefix("Bearer "))
        {
            // The client of the API server uses this token too, so that a credential plugin runs
            // only once.
            config.auth_info.token = Some(bearer.to_owned().into());
            config.auth_info.exec = None;
        }
        let namespace = asked.namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client =
            Client::try_from(config).map_err(|error| PluginError::User(ApiError(error)))?;
        if let Some(account) = asked.service_account {
            token = Some(account_token(&client, &account).await?);
        }
        Ok(ClusterAccess { client, namespace, token })
    }

    /// Returns the `Authorization` header for a request to a node agent.
    ///
    /// # Errors
    /// [`PluginError::NoToken`]: the kubeconfig's user has no token.
    pub fn authorization(&self) -> Result<HeaderValue, PluginError> {
        self.token.clone().ok_or(PluginError::NoToken)
    }
}

async fn config(asked: &ConnectionArgs) -> Result<Config, PluginError> {
    let options = KubeConfigOptions { context: asked.context.clone(), ..Default::default() };
    if let Some(file) = &asked.kubeconfig {
        let read = Kubeconfig::read_from(file)?;
        return Ok(Config::from_custom_kubeconfig(read, &options).await?);
    }
    if asked.context.is_some() {
        return Ok(Config::from_kubeconfig(&options).await?);
    }
    // Without a kubeconfig, kube uses the service account of the pod in which this program runs.
    Config::infer().await.map_err(|error| PluginError::NoConfig(Box::new(error)))
}

/// Returns the authorization header that the kube library would send for the user of this
/// configuration. The token in it comes from the kubeconfig, from a file, or from a credential
/// plugin. `None`: the user has no token.
async fn token_of(config: &Config) -> Result<Option<HeaderValue>, PluginError> {
    let user = |error| PluginError::User(ApiError(error));
    let Some(layer) = config.auth_layer().map_err(user)? else { return Ok(None) };
    let seen = service_fn(|request: Request<Empty<Bytes>>| async move {
        Ok::<_, BoxError>(Response::new(request.headers().clone()))
    });
    let sent = layer.layer(seen).oneshot(Request::new(Empty::new())).await;
    let sent = sent.map_err(|error| user(kube::Error::Service(error)))?;
    let token = sent.body().get(AUTHORIZATION).cloned();
    Ok(token.filter(|token| token.as_bytes().starts_with(b"Bearer ")))
}

async fn account_token(client: &Client, account: &AccountName) -> Result<HeaderValue, PluginError> {
    let AccountName { namespace, name } = account;
    let what = format!("create a token of service account {namespace}/{name}");
    let asked = TokenRequest {
        spec: Some(TokenRequestSpec {
            expiration_seconds: Some(TOKEN_SECONDS),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let made = accounts.create_token_request(name, &PostParams::default(), &asked).await;
    let made = made.map_err(PluginError::api(what))?;
    let token = made.status.and_then(|status| status.token).unwrap_or_default();
    let mut value =
        HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| PluginError::NoToken)?;
    value.set_sensitive(true);
    Ok(value)
}
