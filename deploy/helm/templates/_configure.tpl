{{- /* Puts the values into one object, in place. */ -}}
{{- define "fleetbus.configure" -}}
{{- $object := .object -}}
{{- $values := .root.Values -}}
{{- if eq $object.kind "ConfigMap" -}}
{{- if $values.gpu -}}
{{- $_ := set $object.data "FLEETBUS_RUN_PROFILE" "gpu" -}}
{{- end -}}
{{- range $name, $value := $values.settings -}}
{{- $_ := set $object.data $name (toString $value) -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey $values.replicas $object.metadata.name) (has $object.kind (list "Deployment" "StatefulSet")) -}}
{{- $_ := set $object.spec "replicas" (get $values.replicas $object.metadata.name) -}}
{{- end -}}
{{- if has $object.kind (list "Deployment" "StatefulSet" "Job") -}}
{{- range $container := $object.spec.template.spec.containers -}}
{{- $name := trimPrefix "fleetbus/" $container.image -}}
{{- $repository := printf "%s/%s" (trimSuffix "/" $values.image.registry) $name | trimPrefix "/" -}}
{{- if hasKey $values.image.digests $name -}}
{{- $_ := set $container "image" (printf "%s@%s" $repository (get $values.image.digests $name)) -}}
{{- else -}}
{{- $_ := set $container "image" (printf "%s:%s" $repository $values.image.tag) -}}
{{- end -}}
{{- $_ := set $container "imagePullPolicy" $values.image.pullPolicy -}}
{{- if hasKey $values.resources $container.name -}}
{{- $_ := set $container "resources" (get $values.resources $container.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
