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

{{/* Fails if GPUs would be offered twice. */}}
{{- define "affinode.checkSharing" -}}
{{- if and .Values.devicePlugin.enabled .Values.dra.enabled }}
{{- fail "devicePlugin.enabled and dra.enabled would each offer the same GPUs, so each GPU would be given out twice; set one of them to false" }}
{{- end }}
{{- end }}

{{/* Resources whose pods are GPU pods, as a JSON list. */}}
{{- define "affinode.injectResources" -}}
{{- $resources := .Values.inject.resources }}
{{- if .Values.devicePlugin.enabled }}
{{- $resources = append $resources .Values.devicePlugin.resourceName | uniq }}
{{- end }}
{{- if .Values.dra.enabled }}
{{- /* By this name, Kubernetes lets pods request devices of each class, since 1.36 by default. */}}
{{- $resources = append $resources "deviceclass.resource.kubernetes.io/gpu.affinode.io" | uniq }}
{{- with .Values.dra.extendedResourceName }}
{{- $resources = append $resources . | uniq }}
{{- end }}
{{- end }}
{{- toJson $resources }}
{{- end }}

{{/* Device classes whose pods are GPU pods, as a JSON list. */}}
{{- define "affinode.injectDeviceClasses" -}}
{{- $classes := .Values.inject.deviceClasses }}
{{- if .Values.dra.enabled }}
{{- $classes = append $classes "gpu.affinode.io" | uniq }}
{{- end }}
{{- toJson $classes }}
{{- end }}

{{/*
Which pods are looked at. What users write in inject.namespaceSelector and inject.objectSelector
comes in addition.
*/}}
{{- define "affinode.injectSelectors" -}}
{{- $namespaces := .Values.inject.namespaceSelector }}
{{- $pods := .Values.inject.objectSelector }}
namespaceSelector:
  {{- with $namespaces.matchLabels }}
  matchLabels:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  matchExpressions:
    {{- if .Values.inject.optIn }}
    - key: affinode.io/inject
      operator: In
      values: ["enabled"]
    {{- else }}
    - key: affinode.io/inject
      operator: NotIn
      values: ["ignore"]
    {{- end }}
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: {{ append .Values.inject.excludedNamespaces .Release.Namespace | uniq | toJson }}
    {{- with $namespaces.matchExpressions }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
objectSelector:
  {{- with $pods.matchLabels }}
  matchLabels:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  matchExpressions:
    - key: affinode.io/inject
      operator: NotIn
      values: ["ignore"]
    {{- with $pods.matchExpressions }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The node selector of a pod: the programs of the image are built for one architecture. */}}
{{- define "affinode.nodeSelector" -}}
nodeSelector:
  {{- merge (dict "kubernetes.io/arch" "amd64") . | toYaml | nindent 2 }}
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

{{/* A CEL expression that compares `name` with a list of names; a star at the end matches any suffix. */}}
{{- define "affinode.nameTests" -}}
{{- $tests := list }}
{{- range . }}
{{- if hasSuffix "*" . }}
{{- $tests = append $tests (printf "name.startsWith('%s')" (trimSuffix "*" .)) }}
{{- else }}
{{- $tests = append $tests (printf "name == '%s'" .) }}
{{- end }}
{{- end }}
{{- join " || " $tests }}
{{- end }}
