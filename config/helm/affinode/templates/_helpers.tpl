{{- define "affinode.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "affinode.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- $name := include "affinode.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "affinode.selector" -}}
app.kubernetes.io/name: {{ include "affinode.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "affinode.labels" -}}
{{ include "affinode.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "affinode.image" -}}
{{- $repository := required "image.repository: push the image that `cargo xtask package` makes, and name it here" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "affinode.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (printf "%s-node" (include "affinode.fullname" .)) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Name of this installation in the annotations of its nodes. */}}
{{- define "affinode.installation" -}}
{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end }}

{{/* How GPU pods get the class: policy, webhook or none. */}}
{{- define "affinode.injectBy" -}}
{{- if ne .Values.inject.by "auto" }}
{{- .Values.inject.by }}
{{- else if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" }}
{{- "policy" }}
{{- else }}
{{- "webhook" }}
{{- end }}
{{- end }}

{{- define "affinode.injectSelectors" -}}
namespaceSelector:
  matchExpressions:
    - key: affinode.io/inject
      operator: NotIn
      values: ["ignore"]
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: {{ append .Values.inject.excludedNamespaces .Release.Namespace | uniq | toJson }}
objectSelector:
  matchExpressions:
    - key: affinode.io/inject
      operator: NotIn
      values: ["ignore"]
{{- end }}

{{/*
Changes floats without a fraction in a map to integers, at any depth. Helm reads each number of a
values file as a float, and toToml writes it as 5.0. Numbers in a list of lists stay as they are.
*/}}
{{- define "affinode.wholeNumbers" -}}
{{- $map := . }}
{{- range $key, $value := $map }}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}
{{- $_ := set $map $key (int64 $value) }}
{{- else if kindIs "map" $value }}
{{- include "affinode.wholeNumbers" $value }}
{{- else if kindIs "slice" $value }}
{{- $items := list }}
{{- range $item := $value }}
{{- if and (kindIs "float64" $item) (eq $item (floor $item)) }}
{{- $items = append $items (int64 $item) }}
{{- else }}
{{- if kindIs "map" $item }}
{{- include "affinode.wholeNumbers" $item }}
{{- end }}
{{- $items = append $items $item }}
{{- end }}
{{- end }}
{{- $_ := set $map $key $items }}
{{- end }}
{{- end }}
{{- end }}
